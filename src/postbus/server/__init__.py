"""The HTTP service: routes, auth and tenants, quotas, metrics, edge safety."""
