"""From a run's curves to named findings: what went wrong, since when, why, and which knobs to turn."""
