import jax

from vit_jax.parallel import compiler


def test_options_for_cpu_are_known_to_this_release():
    options = compiler.options()
    assert options
    f = jax.jit(lambda x: x + 1, compiler_options=options)
    assert f(1) == 2


def test_an_option_that_a_release_does_not_know_is_left_out():
    assert compiler.known({"xla_cpu_no_such_option": "1"}) == {}


def test_other_devices_get_none(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert compiler.options() == {}
