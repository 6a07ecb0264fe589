"""Contract checks for authors of policies or readers. Every built-in passes them; a plugin must pass them too.

from coterie.testing import check_planner, check_predictor, check_reader, check_router, check_strategy

def test_my_strategy():
    check_strategy(MyStrategy)

def test_my_router():
    check_router(MyRouter)

def test_my_planner():
    check_planner(MyPlanner)

def test_my_predictor():
    check_predictor(MyPredictor)

def test_my_reader(tmp_path):
    check_reader(MY_READER, an_example_file_in(tmp_path))
"""

from coterie.testing.planners import check_planner
from coterie.testing.predictors import check_predictor
from coterie.testing.readers import check_reader
from coterie.testing.routers import check_router
from coterie.testing.strategies import check_strategy

__all__ = ["check_planner", "check_predictor", "check_reader", "check_router", "check_strategy"]
