"""Bayesian models under differential privacy: posteriors instead of weights."""

from tfdp import rules
from tfdp.variational.annealing import KLAnnealing as KLAnnealing
from tfdp.variational.averaged import AveragedPosterior as AveragedPosterior
from tfdp.variational.convolutional import VariationalConv1D as VariationalConv1D
from tfdp.variational.convolutional import VariationalConv2D as VariationalConv2D
from tfdp.variational.embedding import VariationalEmbedding as VariationalEmbedding
from tfdp.variational.layers import VariationalDense as VariationalDense
from tfdp.variational.logistic_regression import (
    BayesianLogisticRegression as BayesianLogisticRegression,
)
from tfdp.variational.logistic_regression import PredictiveLogit
from tfdp.variational.one_sample import PosteriorSample as PosteriorSample
from tfdp.variational.one_sample import one_posterior_sample as one_posterior_sample
from tfdp.variational.posterior import credible_intervals as credible_intervals
from tfdp.variational.posterior import posterior as posterior
from tfdp.variational.posterior import posterior_samples as posterior_samples
from tfdp.variational.predictive import predictive_intervals as predictive_intervals
from tfdp.variational.predictive import predictive_mean as predictive_mean
from tfdp.variational.predictive import predictive_samples as predictive_samples
from tfdp.variational.rule import (
    predictive_logit,
    variational_embedding,
    variational_product,
)
from tfdp.variational.sgld import dp_sgld as dp_sgld

rules.register(VariationalDense, variational_product)
rules.register(PredictiveLogit, predictive_logit)
rules.register(VariationalConv1D, variational_product)
rules.register(VariationalConv2D, variational_product)
rules.register(VariationalEmbedding, variational_embedding)
