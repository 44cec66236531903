"""What an engine learns of its own times while it runs: steps, loads, and the break-even of cold starts.

Schedulers, cold starts and routers ask it for predictions. Prices of simulated steps, from data sheets or from fitted
profiles, are in ``lab/costs``.
"""
