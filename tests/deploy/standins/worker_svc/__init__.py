"""Stands in for the service's `__main__`; everything else, such as its settings, is real."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
