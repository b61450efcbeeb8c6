"""The embedded engine: a small inference server in one process, with SGLang's HTTP contract.

    HTTP client                event loop (server.py)                       engine thread (engine_thread.py)
    -----------                ----------------------                       -------------------------------
    POST /generate  ---->  parse (request.py), tokenize  -- inbox -->  scheduler.step(), again and again:
                                                                         admit -> forward -> sample -> finish
    response        <----  build JSON (output.py)        <-- events --  finished and streaming requests

The event loop never waits for a decode step, and only the engine thread touches the scheduler, the KV cache and the
model. Weights arrive on a third thread (weights.py), are staged there, and become the model in one swap on the engine
thread, between two steps.
"""
