"""Losses of torch: those of labelled tensors equal those of the aligned data."""

import pytest
import torch
import torch.nn.functional as F

import moduli as mo

LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGET = torch.tensor([[0, 2, 1, -100, 0], [1, 1, 1, 2, 0], [2, 2, 0, 0, 1], [0, 1, 2, 0, 1]])


def logits():
    return mo.tensor(LOGITS, "item kind place", item=list("abcd"), kind=["cat", "dog", "owl"])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_classes_equals_torch(reduction):
    target = mo.tensor(TARGET, "item place", item=list("abcd"))
    result = F.cross_entropy(logits(), target, reduction=reduction)
    torch.testing.assert_close(result.data, F.cross_entropy(LOGITS, TARGET, reduction=reduction))


def test_cross_entropy_aligns_the_target():
    target = mo.tensor(TARGET.flip(0).T, "place item", item=list("dcba"))
    torch.testing.assert_close(F.cross_entropy(logits(), target).data, F.cross_entropy(LOGITS, TARGET))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_probabilities_equals_torch(reduction):
    share = torch.softmax(LOGITS.flip(0), 1)
    target = mo.tensor(share[:, [2, 0, 1]], "item kind place", item=list("abcd"), kind=["owl", "cat", "dog"])
    result = F.cross_entropy(logits(), target, reduction=reduction)
    torch.testing.assert_close(result.data, F.cross_entropy(LOGITS, share, reduction=reduction))


def test_cross_entropy_of_one_item_equals_torch():
    result = F.cross_entropy(mo.tensor(LOGITS[0, :, 0], kind=["cat", "dog", "owl"]), torch.tensor(2))
    torch.testing.assert_close(result.data, F.cross_entropy(LOGITS[0, :, 0], torch.tensor(2)))


def test_cross_entropy_refuses_operands_that_do_not_pair():
    with pytest.raises(ValueError, match="does not fit"):
        F.cross_entropy(logits(), mo.tensor(TARGET, "item where", item=list("abcd")))
    with pytest.raises(ValueError, match="only on the right"):
        F.cross_entropy(logits(), mo.tensor(TARGET, "item place", item=list("abce")))
    with pytest.raises(ValueError, match="reduction"):
        F.cross_entropy(logits(), mo.tensor(TARGET, "item place", item=list("abcd")), reduction="median")
    with pytest.raises(ValueError, match="'kind'"):
        F.cross_entropy(logits(), TARGET, weight=mo.tensor([1.0, 2.0, 3.0], kind=["cat", "dog", "cow"]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_takes_all_options(reduction, smoothing, ignored, weighted, soft):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    # ignore_index applies to class indices only.
    options |= {} if soft else {"ignore_index": ignored}
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    aim = torch.softmax(LOGITS.flip(0), 1) if soft else torch.where(TARGET == -100, ignored, TARGET)
    expected = F.cross_entropy(LOGITS, aim, weights if weighted else None, **options)
    target = mo.tensor(aim, "item kind place" if soft else "item place", item=list("abcd"))
    labelled = mo.tensor(weights.flip(0), kind=["owl", "dog", "cat"])
    for weight in (labelled, weights) if weighted else (None,):
        result = F.cross_entropy(logits(), target, weight, **options)
        torch.testing.assert_close(result.data, expected)
        assert result.names == (("item", "place") if reduction == "none" else ())


@pytest.mark.compiles_labels
def test_compiled_cross_entropy_has_the_gradient_of_torch():
    leaf = LOGITS.clone().requires_grad_()
    target = mo.tensor(TARGET, "item place", item=list("abcd"))
    x = mo.tensor(leaf, "item kind place", item=list("abcd"), kind=["cat", "dog", "owl"])
    loss = torch.compile(lambda a: F.cross_entropy(a, target), fullgraph=True, backend="eager")(x)
    loss.backward()
    plain = LOGITS.clone().requires_grad_()
    F.cross_entropy(plain, TARGET).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_functions_accept_the_keywords_of_torch():
    t = logits()
    assert torch.equal(torch.sum(t, axis=0).data, LOGITS.sum(0))
    assert torch.equal(torch.argmax(input=t, dim=1).data, LOGITS.argmax(1))
    assert torch.equal(torch.add(input=t, other=t).data, LOGITS + LOGITS)
