"""The features, in the order of registration."""

from __future__ import annotations

from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.features_manager.own_features import BasicFeature, OwnLinearLayersFeature, OwnUShapeFeature

MindSpeedFeaturesManager.set_features_list([BasicFeature(), OwnLinearLayersFeature(), OwnUShapeFeature()])
