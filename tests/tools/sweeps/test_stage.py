"""What is tried, chosen and run; with training replaced by made scores."""

import types

import pytest

from vit_jax.errors import UserError
from vit_jax.tools.sweeps import stage

RATE = "optim.learning_rate"


def tuned(scores, tune_by="val/top1", key=RATE):
    """Returns the trials of values with made scores, and the best of them."""

    def measure(config, folder, shared, *, keep):
        if (score := scores[config.value]) is None:
            return {"diverged": "the loss is NaN"}
        final = {"val": {"params": {"top1": score, "loss": score}}}
        about = {"variant": "Ti/4", "dataset": "made", "steps": 2, "wall_seconds": 1.0}
        return about | {"final": final}

    def trial(choice):
        return "folder", types.SimpleNamespace(value=choice[key], seed=0)

    grid = [{key: value} for value in scores]
    found = stage.Stage("work", grid, tune_by, [0], None, trial, measure=measure)
    trials = list(found.trials(None))
    return trials, found.choose(trials)


@pytest.mark.parametrize(
    ("scores", "best", "said"),
    [
        ({0.1: 0.5, 0.2: 0.75, 0.4: 0.25}, 0.2, "0.75"),
        (
            {0.1: 0.5, 0.2: 0.75, 0.3: 0.75, 0.4: 0.25},
            0.2,
            "0.75; tied with learning_rate=0.3, the first is chosen",
        ),
        (
            {0.1: 0.5, 0.2: 0.1},
            0.1,
            (
                "0.5; warning: a better optim.learning_rate may lie below 0.1: try more "
                "values, in another --workdir"
            ),
        ),
        (
            {0.1: 0.1, 0.2: 0.5},
            0.2,
            (
                "0.5; warning: a better optim.learning_rate may lie above 0.2: try more "
                "values, in another --workdir"
            ),
        ),
        # What diverged cannot win, but bounds the grid.
        ({0.1: 0.1, 0.2: 0.5, 0.4: None}, 0.2, "0.5"),
    ],
)
def test_the_best_is_the_first_of_the_highest_and_doubts_are_said(
    scores, best, said, capsys
):
    trials, chosen = tuned(scores)
    assert [trial["score"] for trial in trials] == list(scores.values())
    assert chosen["choice"] == {RATE: best}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"learning_rate={best} is best by val/top1: {said}"


def test_the_lowest_loss_is_best_and_words_have_no_edge(capsys):
    scores = {"sgd": 0.75, "adam": 0.5}
    assert tuned(scores, "val/loss", "optim.name")[1]["choice"] == {
        "optim.name": "adam"
    }
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "name=adam is best by val/loss: 0.5"


def test_nothing_is_chosen_of_what_all_diverged():
    assert tuned({0.1: None, 0.2: None})[1] is None


def test_folders_differ_as_their_texts_do():
    texts = ["R50+B/16,x=1.5", "R50+B_16,x=1.5", "R50+B%2F16,x=1.5"]
    names = list(map(stage.file_name, texts))
    assert names[0] == "R50+B%2F16,x=1.5"
    assert len(set(names)) == 3
    assert not any("/" in name for name in names)


def test_an_absent_score_is_told_with_those_that_are_there():
    final = {"val": {"params": {"top1": 0.5}, "ema": {"top1": 0.75}}}
    assert stage.score_of(final, "val/top1") == 0.75
    assert stage.score_of(final, "val/params/top1") == 0.5
    with pytest.raises(UserError, match="scores 'val/top9', but val has top1"):
        stage.score_of(final, "val/top9")
