"""The kind ``github``: a repository's issues, pull requests, comments, reviews, runs and events."""

from postbus.sources.github.source import GithubSettings, GithubSource

__all__ = ["GithubSettings", "GithubSource"]
