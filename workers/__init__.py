"""The workers: devices and arithmetic. Imports run down this line of rooms, and import-linter checks it:

pool | export -> engine -> selftest -> training | sampling -> bank -> model -> rows | host -> contract
"""
