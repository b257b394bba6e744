"""Everything memfit prints on a terminal."""
