import pytest

from miles.rollout.rm_hub.f1 import f1_score, normalize_answer
from miles.rollout.rm_hub.gpqa import compute_gpqa_reward
from miles.rollout.rm_hub.math_dapo_utils import (
    compute_score,
    is_correct_minerva,
    last_boxed_only_string,
    normalize_final_answer,
    remove_boxed,
)


class TestDapo:
    @pytest.mark.parametrize(
        ("response", "label", "correct", "prediction"),
        [
            ("Answer: 34", "34", True, "34"),
            ("answer : $34$", 34, True, "34"),
            ("Answer: 1\nAnswer: 2", "2", True, "2"),
            ("Answer: 33", "34", False, "33"),
            ("It is 34", "34", False, "[INVALID]"),
            ("Answer: x = 1,234 dollars.", "1234", True, "1234"),
            (r"Answer: \boxed{12}", "12", True, "12"),
            (r"Answer: \dfrac12", r"\frac{1}{2}", True, r"\frac{1}{2}"),
            ("Answer: 34" + " " * 300, "34", False, "[INVALID]"),
        ],
    )
    def test_the_last_answer_line_counts(self, response, label, correct, prediction):
        score = 1.0 if correct else -1.0
        assert compute_score(response, label) == {"score": score, "acc": correct, "pred": prediction}

    def test_strict_boxes(self):
        assert compute_score(r"\boxed{34}", "34", strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "34"}
        assert compute_score("Answer: 34", "34", strict_box_verify=True) == {"score": -1.0, "acc": False, "pred": None}

    @pytest.mark.parametrize(
        ("answer", "normal"),
        [
            ("the 5", "5"),
            ("50\\%", "50"),
            (r"90^\circ", "90"),
            (r"\text{5} \text{ cm}", "5"),
            ("12 square units", "12"),
            (r"\sqrt2", r"\sqrt{2}"),
            ("smiles", "smiles"),
        ],
    )
    def test_normalisation(self, answer, normal):
        assert normalize_final_answer(answer) == normal

    def test_boxes_in_labels_and_helpers(self):
        assert is_correct_minerva("Answer: 5", r"so \boxed{5}", gt_need_extract=True) == (True, "5")
        assert last_boxed_only_string(r"a \boxed{b} c") == r"\boxed{b}"
        assert last_boxed_only_string("a") is None
        assert remove_boxed(r"\boxed{b}") == "b"
        with pytest.raises(ValueError, match="not a"):
            remove_boxed("b")


class TestF1:
    @pytest.mark.parametrize(
        ("prediction", "truth", "scores"),
        [
            ("the red house", "a red barn", (0.5, 0.5, 0.5)),
            ("Paris!", "paris", (1.0, 1.0, 1.0)),
            ("in Paris France", "Paris", (0.5, 1 / 3, 1.0)),
            ("Rome", "Paris", (0.0, 0.0, 0.0)),
            ("yes it is", "yes", (0.0, 0.0, 0.0)),
            ("yes", "Yes.", (1.0, 1.0, 1.0)),
            ("x x y", "x y y z z z", (4 / 9, 2 / 3, 1 / 3)),
            ("", "x", (0.0, 0.0, 0.0)),
            (None, "x", (0.0, 0.0, 0.0)),
            ("Paris", None, (0.0, 0.0, 0.0)),
            ("Paris", ["Rome", "Paris"], (1.0, 1.0, 1.0)),
            ("5", 5, (1.0, 1.0, 1.0)),
        ],
    )
    def test_f1_precision_and_recall(self, prediction, truth, scores):
        assert f1_score(prediction, truth) == pytest.approx(scores)

    def test_normalisation(self):
        assert normalize_answer("The  Cat, an  Owl & a dog!") == "cat owl dog"


class TestGpqa:
    CHOICES = ("red", "green", "blue", "10 cm")

    @pytest.mark.parametrize(
        ("response", "letter"),
        [
            ("The answer is (B).", "B"),
            ("**Answer: C**", "C"),
            (r"\boxed{D}", "D"),
            (r"\boxed{\text{(A)}}", "A"),
            (r"\boxed{green}", "B"),
            ("(A) is wrong, so (C)", "C"),
            ("So\nB", "B"),
            ("Answer: A is tempting. The answer is D", "D"),
            ("<think>The answer is (A)</think>The answer is (B)", "B"),
            ("blue", "C"),
        ],
    )
    def test_the_letter_that_a_response_settles_on(self, response, letter):
        for other in "ABCD":
            reward = compute_gpqa_reward(response, other, {"choices": self.CHOICES})
            assert reward == float(other == letter)

    @pytest.mark.parametrize("response", ["", "A good question.", "The answer is (H)", "I answer: Also no"])
    def test_no_letter_is_no_reward(self, response):
        assert not any(compute_gpqa_reward(response, letter, {"choices": self.CHOICES}) for letter in "ABCD")

    @pytest.mark.parametrize("label", ["C", "c", "(C)", 2, "blue", "Blue"])
    def test_labels_are_letters_indices_or_texts(self, label):
        assert compute_gpqa_reward("Answer: C", label, {"choices": self.CHOICES}) == 1.0
        assert compute_gpqa_reward("Answer: A", label, {"choices": self.CHOICES}) == 0.0

    def test_the_correct_letter_of_the_metadata_wins(self):
        assert compute_gpqa_reward("Answer: C", "A", {"correct_letter": "C"}) == 1.0

    @pytest.mark.parametrize("label", [None, "", 99, "purple"])
    def test_an_unusable_label_rewards_nobody(self, label):
        assert compute_gpqa_reward("Answer: A", label, None) == 0.0
