"""How many programs a run compiles, how long that takes, and how many were kept."""

import jax

# As JAX reports them; the first includes reading a program that was kept.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"


class Compilations:
    """Counts what JAX compiles, in all threads; use as a context manager.

    Attributes:
      seconds: taken to compile programs, or to read those that were kept.
      programs: compiled or read.
      found: of those, read from the compilation cache.
    """

    def __init__(self):
        self.seconds, self.programs, self.found = 0.0, 0, 0

    def line(self) -> str:
        """Says it in a few words."""
        return (
            f"{self.programs} programs compiled or read in {self.seconds:.1f} s, "
            f"{self.found} of them from the compilation cache"
        )

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, seconds: float, **_) -> None:
        if event == _COMPILED:
            self.seconds += seconds
            self.programs += 1

    def _on_event(self, event: str, **_) -> None:
        self.found += event == _FOUND
