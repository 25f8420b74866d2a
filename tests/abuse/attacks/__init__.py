"""The attacks, by kind; importing this package lists all of them."""

from tests.abuse.attack import ATTACKS as ATTACKS
from tests.abuse.attacks import connections as connections
from tests.abuse.attacks import flow_control as flow_control
from tests.abuse.attacks import grammars as grammars
from tests.abuse.attacks import interfaces as interfaces
from tests.abuse.attacks import messages as messages
from tests.abuse.attacks import scheduling as scheduling
from tests.abuse.attacks import tokens as tokens
