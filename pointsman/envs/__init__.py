"""Environments to learn in; `gymnasium` knows them as "pointsman/…".

Nothing here needs gymnasium: a router that only loads a policy should not import it. `import
pointsman.envs.gym` registers in any case, `import pointsman.envs` where gymnasium was imported before.
"""

from __future__ import annotations

import sys

KINDS = {"pointsman/Routing-v0": "Routing", "pointsman/Jobs-v0": "Jobs"}


def register_environments() -> None:
    """Tell gymnasium what `make` and `make_vec` can make; twice does no harm."""
    import gymnasium

    for name, kind in KINDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(
                name,
                entry_point=f"pointsman.envs.gym:Gym{kind}Env",
                vector_entry_point=f"pointsman.envs.gym:Gym{kind}VectorEnv",
            )


if "gymnasium" in sys.modules:
    register_environments()
