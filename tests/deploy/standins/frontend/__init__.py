"""Stands in for the service's `__main__`; all else, such as its settings, is the service's own."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
