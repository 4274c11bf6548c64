import threading

import jax
import jax.numpy as jnp

from vit_jax.training.timers import CompilationCounter


def test_programs_of_all_threads_are_counted_while_it_is_open():
    functions = [jax.jit(lambda x, i=i: jnp.sin(x) * (i + 71.5)) for i in range(4)]
    x = jnp.ones(3)
    with CompilationCounter() as compilations:
        functions[0](x)
        functions[0](x)  # Is compiled already.
        thread = threading.Thread(target=functions[1], args=(x,))
        thread.start()
        thread.join()
        functions[2].lower(x).compile()
    functions[3](x)
    assert compilations.programs == 3
    assert 0 < compilations.seconds < 60
    assert compilations.summary().startswith("3 programs compiled or read in ")


def test_programs_from_the_cache_are_told_apart():
    compilations = CompilationCounter()
    with compilations:
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        jax.monitoring.record_event("/jax/compilation_cache/cache_misses")
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert compilations.cached == 1
