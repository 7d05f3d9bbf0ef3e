"""Pictures of masks and weights: matplotlib figures (`pip install tiled-attention[compare]`), and pages for a browser that need nothing."""

from .heatmap import heatmap
from .html import Page, html
from .mask import mask

__all__ = ["Page", "heatmap", "html", "mask"]
