"""Jobs built on the library, each in its own folder; the library imports none of them."""
