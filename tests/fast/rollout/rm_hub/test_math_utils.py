import pytest

from miles.rollout.rm_hub.deepscaler import deepscaler_reward, get_deepscaler_rule_based_reward
from miles.rollout.rm_hub.grading import close_grader
from miles.rollout.rm_hub.math_utils import (
    extract_answer,
    extract_boxed_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    math_reward,
    normalize_answer,
    settled_as_text,
)


@pytest.fixture(scope="module", autouse=True)
def grader_ends():
    yield
    close_grader()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 7$", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{\frac{1}{2", None),
        (r"\boxed", None),
        ("seven", None),
        ("", None),
    ],
)
def test_the_last_box_is_extracted(text, answer):
    assert extract_boxed_answer(text) == answer
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (" 1,234,567 ", "1234567"),
        ("1,2", "1,2"),
        ("$5$", "5"),
        (r"\$5", "5"),
        (r"\text{yes}", "yes"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\leftarrow", r"\leftarrow"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"90^\circ", "90"),
        (r"50\%", "50%"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("3.0", "3"),
        ("3.00.", "3"),
    ],
)
def test_normalisation_removes_what_has_no_meaning(answer, normal):
    assert normalize_answer(answer) == normal


@pytest.mark.parametrize(
    ("given", "expected", "verdict"),
    [
        ("5", "5", True),
        ("1,000", "1000", True),
        ("Even", r"\text{even}", True),
        ("listen", "silent", False),
        ("", "5", False),
        ("5", "", False),
        ("1/2", "0.5", None),
        ("a", "A", None),
    ],
)
def test_text_settles_what_it_can(given, expected, verdict):
    assert settled_as_text(given, expected) is verdict
    assert grade_answer_mathd(given, expected) is (verdict is True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0.5", r"\frac{1}{2}"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("x+1", "1+x"),
        ("1024", "2^{10}"),
        ("5", "x=5"),
        ("50%", "0.5"),
        (r"\{2,1\}", r"\{1,2\}"),
        (r"[0,1)", r"\left[0, 1\right)"),
        (r"5 \text{ cm}", "5"),
    ],
)
def test_equivalent_answers(given, expected):
    assert grade_answer_sympy(given, expected)
    assert grade_answer_verl(rf"The answer is \boxed{{{given}}}.", expected)
    assert grade_answer_verl(rf"\boxed{{{given}}}", rf"\boxed{{{expected}}}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0.4", "1/2"),
        ("-3", "3"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", "[0,1]"),
        (r"\frac{1}{", "1"),
        ("}{", "2"),
        ("x+1", "x+2"),
    ],
)
def test_different_answers(given, expected):
    assert not grade_answer_sympy(given, expected)


async def test_math_reward_is_one_or_zero():
    assert await math_reward(r"\boxed{0.50}", "1/2") == 1
    assert await math_reward(r"\boxed{42}", 42) == 1
    assert await math_reward(r"\boxed{41}", 42) == 0
    assert await math_reward("42", 42) == 0
    assert await math_reward(r"\boxed{42}", None) == 0
    assert not grade_answer_verl(r"\boxed{None}", None)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"<think>\boxed{1}</think> It is \boxed{0.5}", "1/2", 1),
        (r"<think>\boxed{0.5}</think> It is 0.5", "1/2", 0),
        (r"\boxed{0.5}", "1/2", 0),
        (r"... ###Response: \boxed{0.5}", "1/2", 1),
        (r"</think>\boxed{3}", ["2", r"\boxed{3}"], 1),
        (r"</think>\boxed{3}", [], 0),
        (r"</think>\boxed{3}", None, 0),
        (r"</think>\boxed{3}", 3, 1),
        (r"</think>\boxed{3}", 3.0, 1),
    ],
)
async def test_deepscaler_reads_what_follows_the_thinking(response, label, reward):
    assert await deepscaler_reward(response, label) == reward
    assert get_deepscaler_rule_based_reward(response, label) == reward
