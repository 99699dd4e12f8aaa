"""Groups of config fields, each field declared once in the whole library."""
