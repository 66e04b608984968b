"""The demo: three tenants train at the same time on one small pool."""
