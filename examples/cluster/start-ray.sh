#!/usr/bin/env bash
# Starts Ray on one node of a cluster, or waits until all nodes are there.
#
#   bash start-ray.sh head                        on the first node; stays in the foreground
#   RAY_HEAD=10.0.0.1 bash start-ray.sh worker    on every other node; stays in the foreground
#   RAY_HEAD=10.0.0.1 bash start-ray.sh wait 4    anywhere: until 4 nodes are there, at most WAIT_SECS (default 600)
#
# Further arguments of head and worker go to `ray start`: --num-cpus, --temp-dir, ports.
#
#   RAY_HEAD       address of the first node, as the others reach it
#   RAY_PORT       port of Ray's head process (default 6379); DASHBOARD_PORT: of jobs and dashboard (default 8265)
#   MILES_HOST_IP  address under which other nodes reach this one (default: the one on the route to RAY_HEAD)
#   NUM_GPUS       GPUs to offer (default: all)
#   RAY_AUTH_TOKEN with RAY_AUTH_MODE=token, the same on all nodes: who does not have it is turned away. Where the user has
#                  a token (also ~/.ray/auth_token), RAY_AUTH_MODE=token is the default; RAY_AUTH_MODE=disabled: none
#
# Environment variables that processes of a run need on this node only, such as NCCL_SOCKET_IFNAME, must be set here: Ray
# hands its own environment down. Those that the whole run needs belong into the job's runtime_env.
set -euo pipefail

mode=${1:?head, worker or wait}
port=${RAY_PORT:-6379}
dashboard=${DASHBOARD_PORT:-8265}
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
auth=$(python -P "$checkout/miles/ray/token_auth.py") # the driver's rule
[ -z "$auth" ] || export RAY_AUTH_MODE="$auth"

own_address() { # the local address on the route to $1
    python -c 'import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.connect((sys.argv[1], 9))
    print(sock.getsockname()[0])' "$1"
}

# Every sample in flight is a connection; the usual limit of 1024 files is too low for a large run.
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"

options=(--disable-usage-stats --block)
[ -n "${NUM_GPUS:-}" ] && options+=(--num-gpus="$NUM_GPUS")
options+=("${@:2}")

case $mode in
head)
    export MILES_HOST_IP=${MILES_HOST_IP:-$(own_address "${RAY_HEAD:-192.0.2.1}")} # a reserved address: the way out
    exec ray start --head --node-ip-address="$MILES_HOST_IP" --port="$port" \
        --dashboard-host=0.0.0.0 --dashboard-port="$dashboard" "${options[@]}"
    ;;
worker)
    : "${RAY_HEAD:?set RAY_HEAD to the address of the first node}"
    export MILES_HOST_IP=${MILES_HOST_IP:-$(own_address "$RAY_HEAD")}
    exec ray start --address="$RAY_HEAD:$port" --node-ip-address="$MILES_HOST_IP" "${options[@]}"
    ;;
wait)
    : "${RAY_HEAD:?set RAY_HEAD to the address of the first node}"
    exec python -c 'import sys, time
import ray
address, wanted, limit = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
why = ""
while True:
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        nodes = [node for node in ray.nodes() if node["Alive"]]
    except (ConnectionError, ray.exceptions.RayError) as error:  # RayError: a wrong token, or none
        nodes, why = [], f": {error}"
    if len(nodes) >= wanted:
        gpus = sum(node["Resources"].get("GPU", 0) for node in nodes)
        print(f"{len(nodes)} nodes with {gpus:g} GPUs")
        break
    if time.monotonic() > limit:
        sys.exit(f"{len(nodes)} of {wanted} nodes joined {address} in time{why}")
    time.sleep(2)' "$RAY_HEAD:$port" "${2:?number of nodes}" "${WAIT_SECS:-600}"
    ;;
*)
    echo "start-ray.sh: head, worker or wait, not $mode" >&2
    exit 2
    ;;
esac
