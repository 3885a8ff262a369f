"""What lies outside: web addresses and programs that users named, each called within limits of time and size."""

from postbus.outside.program import Ended, run_program
from postbus.outside.web import Answer, check_url, rate_limit_s, refused, request

__all__ = ["Answer", "Ended", "check_url", "rate_limit_s", "refused", "request", "run_program"]
