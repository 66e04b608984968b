"""`python -m tinkerpool.recipes` lists the recipes."""

from tinkerpool import recipes

if __name__ == "__main__":
    print(recipes.__doc__)
