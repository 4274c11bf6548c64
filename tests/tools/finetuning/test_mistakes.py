"""Classes, confusions, single mistakes and doubtful labels, against scikit-learn."""

import numpy as np
import pytest
from helpers import tiny_config
from sklearn import metrics
from sklearn.datasets import load_digits

from vit_jax.data.sources.open import open_source
from vit_jax.tools.finetuning import confusion, mistakes, report
from vit_jax.tools.finetuning.mistakes import Answers
from vit_jax.tools.finetuning.page import Common
from vit_jax.tools.report import templates
from vit_jax.tools.report.blocks import Table


def made(one_each, count=300, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, classes)).astype(np.float32)
    if one_each:
        labels = np.eye(classes, dtype=np.int64)[rng.integers(0, classes - 1, count)]
    else:
        labels = (rng.random((count, classes)) < 0.4).astype(np.int64)
    names = tuple("abcdefgh"[:classes])
    return Answers(logits + 1.5 * labels.astype(np.float32), labels, names, one_each)


def test_the_page_counts_confusions_and_escapes_names():
    logits = np.eye(3, dtype=np.float32)[[0, 1, 1, 1]]
    labels = np.eye(3, dtype=np.int64)[[0, 0, 0, 2]]
    answers = Answers(logits, labels, ("ant", "bee", "<cat>\udcff $\u9ce5_"), True)
    source = open_source(tiny_config().data, "train")
    counts = {"train": np.array([0, 0, 0, 1, 2, 2])}
    values = report.contents(answers, source, np.arange(4), counts, "val")
    settings = Table("Settings", ("key", "value"), (("seed", "<1>"),))
    common = Common("<A>", "Score.", [], [("images", "a/b")], [], settings, "again", [])
    values |= {"num_twins": None, "dedup_command": "a & b", "doubts": []}
    page = templates.render("finetuning/page.html", common=common, **values)
    page.encode()
    assert "<h3>ant predicted as bee: 2 images</h3>" in page
    # Each image once: two of that pair, another mistake and the right answer.
    assert page.count('<img src="data:image/jpeg') == 2 + 1 + 1
    assert 'alt="&lt;cat&gt;? $\u9ce5_; predicted as bee 58%"' in page
    assert ">&lt;cat&gt;? $\u9ce5_</text>" in page  # Of the confusion matrix.
    assert "<figcaption>ant 58%; right<br>" in page and "Right answers: 1 of 1" in page
    assert 'scope="row">ant</th><td>3</td><td>3</td><td>33.3%</td>' in page
    assert "The columns train, val have" in page
    assert "<code>a &amp; b</code>" in page and "mislabelled: 0</h2>" in page
    assert "<title>&lt;A&gt;</title>" in page and "<cat>" not in page


def test_right_answers_take_turns_and_no_image_of_loss_0_has_a_high_loss():
    logits = 20 * np.eye(2, dtype=np.float32)[[0, 0, 0, 1, 1]]
    logits[4] = (0.0, 1.0)
    labels = np.eye(2, dtype=np.int64)[[0, 0, 0, 1, 1]]
    answers = Answers(logits, labels, ("ant", "bee"), True)
    assert answers.right_answers() == [0, 3, 1, 4, 2]
    source = open_source(tiny_config().data, "train")
    many = Answers(
        *(np.repeat(x, 5, axis=0) for x in (logits, labels)), ("a", "b"), True
    )
    values = report.contents(many, source, np.arange(25) % 20, {}, "test")
    assert len(values["right"]) == 12 < values["num_right"] == 25
    captions = {each["caption"] for each in values["losses"]}
    assert captions <= {"loss 0.31; b 73%; right"}


def test_confused_classes_stand_together_and_the_others_last():
    counts = np.diag([20, 20, 20, 20, 20, 20])
    counts[0, 3], counts[3, 5], counts[1, 4] = 6, 5, 4
    assert confusion.order(counts).tolist()[-1] == 2
    places = np.argsort(confusion.order(counts))
    assert sorted(places[[0, 3, 5]]) in ([0, 1, 2], [2, 3, 4])
    assert abs(places[1] - places[4]) == 1
    matrix = confusion.matrix(counts, tuple("abcdef"))
    assert np.sum(matrix.counts) == counts.sum() and matrix.note == ""
    # Of more than 100 classes, those with the most mistakes.
    large = np.diag(np.full(103, 9))
    large[101, 102] = 3
    shown = confusion.matrix(large, tuple(map(str, range(103))))
    assert shown.classes[:2] in (("101", "102"), ("102", "101"))
    assert len(shown.classes) == 100 and "100 of 103" in shown.note


def test_the_classes_that_are_recognised_worst_come_first():
    labels = np.eye(4, dtype=np.int64)[[0, 0, 1, 1, 1, 2]]
    logits = np.eye(4, dtype=np.float32)[[0, 0, 1, 0, 1, 0]]
    answers = Answers(logits, labels, ("ant", "bee", "cat", "dog"), True)
    found = [(one.name, one.images, one.recall) for one in answers.least_recalled(3)]
    assert found == [("cat", 1, 0), ("bee", 3, pytest.approx(2 / 3))]


@pytest.mark.parametrize("one_each", [True, False])
def test_scores_of_classes(one_each):
    answers = made(one_each)
    labels, predicted = answers.labels > 0, answers.predicted
    for k, found in enumerate(answers.by_class()):
        right = (labels & predicted)[:, k].sum()
        images, chosen = labels[:, k].sum(), predicted[:, k].sum()
        recall = right / images if images else np.nan
        scores = recall, right / chosen, 2 * right / (images + chosen)
        np.testing.assert_allclose(found[1:5], (images, *scores))
    assert (images == 0) == one_each == np.isnan(found.average_precision)
    area = metrics.average_precision_score(labels[:, 0], answers.probabilities[:, 0])
    assert answers.by_class()[0].average_precision == pytest.approx(area)


def test_losses_and_the_order_of_mistakes():
    answers = made(True)
    truth, best = answers.labels.argmax(1), answers.logits.argmax(1)
    total = metrics.log_loss(truth, answers.probabilities, labels=range(4))
    assert answers.losses.mean() == pytest.approx(total)
    assert answers.highest_losses(5) == np.argsort(-answers.losses)[:5].tolist()
    wrong = answers.mistakes()
    assert sorted(wrong) == np.flatnonzero(truth != best).tolist()
    assert (np.diff(answers.probabilities.max(1)[wrong]) <= 0).all()
    table = metrics.confusion_matrix(truth, best)
    np.fill_diagonal(table, 0)
    pairs = answers.confusions(100)
    assert [len(pair.images) for pair in pairs] == sorted(table[table > 0])[::-1]
    for pair in pairs:
        assert {truth[i] for i in pair.images} == {pair.true}
        assert len(pair.images) == table[pair.true, pair.predicted]


def test_mistakes_of_several_labels():
    logits = np.array([[5, -5], [5, 1], [-2, -9], [9, -9]], np.float32)
    labels = np.array([[1, 0], [1, 0], [1, 0], [0, 0]])
    answers = Answers(logits, labels, ("a", "b"), False)
    assert answers.mistakes() == [3, 2, 1]  # The label furthest from the truth counts.
    assert answers.confusions(5) == []
    expected = np.logaddexp(0, np.where(labels > 0, -logits, logits)).sum(1)
    np.testing.assert_allclose(answers.losses, expected, rtol=1e-4)


@pytest.mark.parametrize("one_each", [True, False])
def test_bins_hold_all_and_give_the_error(one_each):
    answers = made(one_each)
    rows, error = answers.calibration()
    total = sum(number for _, _, number in rows)
    assert total == (300 if one_each else 1_200)
    parts = [number / total * abs(mean - right) for mean, right, number in rows]
    assert error == pytest.approx(sum(parts), abs=1e-6)


def test_labels_that_were_changed_are_found_again():
    digits = load_digits()
    features, labels = digits.data.astype(np.float32), digits.target.copy()
    before = mistakes.doubtful_labels(features, labels, 100)
    rng = np.random.default_rng(0)
    changed = rng.choice(len(labels), 20, replace=False)
    truth = labels[changed].copy()
    labels[changed] = (truth + rng.integers(1, 10, 20)) % 10
    found = mistakes.doubtful_labels(features, labels, 100)
    numbers = {doubt.image for doubt in found}
    assert len(numbers & {*changed.tolist()}) >= 18
    assert len(numbers - {*changed.tolist()}) <= len(before) + 1
    says = {doubt.image: doubt.other for doubt in found}
    right = [says[i] == t for i, t in zip(changed, truth, strict=True) if i in says]
    assert np.mean(right) > 0.9
    assert mistakes.doubtful_labels(features[:1], labels[:1], 5) == []


def test_labels_are_checked_in_a_ninth_of_the_time_of_the_training():
    short = tiny_config(total_steps=6, batch_size=8)
    assert report.num_checked(short, 1_000) == 16
    long = tiny_config(total_steps=10**6, batch_size=8)
    assert report.num_checked(long, 10**6) == 20_000
