"""tercet — pre-train, post-train and serve K3-architecture language models.

``import tercet`` is cheap: it loads no torch. The rooms (``tercet.model``, ``tercet.train``, …) load what they need.
"""

__version__ = "0.1.0"
