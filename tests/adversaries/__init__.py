"""Stacks that cheat, crash and hang. The registry finds them where RIDGEMARK_EXTRA_STACKS names this package."""
