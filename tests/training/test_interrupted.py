import os
import signal
import threading
import time

import pytest
from helpers import tiny_config

from vit_jax.errors import Interrupted
from vit_jax.training import loop


def test_the_stop_button_of_a_notebook_saves_and_raises_keyboard_interrupt(tmp_path):
    config = tiny_config(total_steps=100_000, every={"log": 1, "checkpoint": 0})

    def press():
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    button = threading.Thread(target=press)
    button.start()
    try:
        with pytest.raises(
            KeyboardInterrupt, match=r"Ctrl-C: step \d+ of 100000 is saved in"
        ) as raised:
            loop.train(config, tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        button.join()
        signal.signal(signal.SIGINT, before)
    assert raised.type is Interrupted
    step = str(raised.value).split()[2]
    assert (tmp_path / "checkpoints" / step).is_dir()
