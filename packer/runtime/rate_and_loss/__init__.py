"""What one optimizer update needs to know of its step: the learning rate, and the divisor of the loss."""

from packer.runtime.rate_and_loss.loss import count_loss_tokens
from packer.runtime.rate_and_loss.lr import PlanLR, scaled_lr
from packer.runtime.rate_and_loss.multiplier import measure_loss_multiplier

__all__ = ["PlanLR", "count_loss_tokens", "measure_loss_multiplier", "scaled_lr"]
