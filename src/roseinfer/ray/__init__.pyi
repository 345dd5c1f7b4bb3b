from ray.serve import Application

from roseinfer.ray.data import LineActor as LineActor
from roseinfer.ray.data import answer_all as answer_all
from roseinfer.ray.data import answer_lines as answer_lines
from roseinfer.ray.serve import build_app as build_app

app: Application
