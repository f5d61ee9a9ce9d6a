"""ajusta: fine-tune a language model on your own data on one GPU (or none), and never run out of memory.

The public door. Each name is fetched when it is first asked for, so `import ajusta` costs nothing and loads no torch:

    config = ajusta.load_config(overrides={"model": "my-model", "data": ["book.txt"], "out": "runs/book"})
    record = ajusta.finetune(config)
    model = ajusta.load("runs/book")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajusta.base.errors import AjustaError, DoesNotFit, UserError
    from ajusta.look import explain, plan
    from ajusta.run import evaluate, export, finetune, load
    from ajusta.spec.config import Config, load_config

__version__ = "0.1.0"

__all__ = [
    "AjustaError",
    "Config",
    "DoesNotFit",
    "UserError",
    "__version__",
    "evaluate",
    "explain",
    "export",
    "finetune",
    "load",
    "load_config",
    "plan",
]

_HOME = {
    "AjustaError": "ajusta.base.errors",
    "DoesNotFit": "ajusta.base.errors",
    "UserError": "ajusta.base.errors",
    "Config": "ajusta.spec.config",
    "load_config": "ajusta.spec.config",
    "evaluate": "ajusta.run",
    "export": "ajusta.run",
    "finetune": "ajusta.run",
    "load": "ajusta.run",
    "explain": "ajusta.look",
    "plan": "ajusta.look",
}


def __getattr__(name: str) -> object:
    """Fetch a public name from the module that defines it, once."""
    if name not in _HOME:
        raise AttributeError(f"module 'ajusta' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
