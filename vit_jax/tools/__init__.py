"""Jobs built on the library, one per folder; the library imports none of them."""
