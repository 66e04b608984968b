"""placeholder"""
def register(app: object) -> None:
    """x"""
