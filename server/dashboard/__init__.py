"""The dashboard at /dashboard: pages for a browser, and the data that they show. Knows no engine but its client."""
