"""Looking at samplers: tables, text and figures from built objects."""

from .densities import Profile, density_chart, density_figure, profile

__all__ = ["Profile", "density_chart", "density_figure", "profile"]
