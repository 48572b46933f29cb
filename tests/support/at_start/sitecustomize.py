"""Python imports this as it starts, where a test has put this folder on its path: see strikes.py."""

from support.strikes import arm_later

arm_later()
