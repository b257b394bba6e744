"""Train a DCGAN: a generator and a discriminator, each with its own optimizer."""

import argparse

import torch
from torch import nn


def make_generator(latent, width):
    layers, channels = [nn.ConvTranspose2d(latent, width * 8, 4, bias=False)], width * 8
    while channels > width:
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        layers += [nn.ConvTranspose2d(channels, channels // 2, 4, stride=2, padding=1, bias=False)]
        channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(channels, 3, 4, stride=2, padding=1), nn.Tanh())


def make_discriminator(width):
    layers, channels = [nn.Conv2d(3, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2, inplace=True)], width
    while channels < width * 8:
        layers += [nn.Conv2d(channels, channels * 2, 4, stride=2, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(channels * 2), nn.LeakyReLU(0.2, inplace=True)]
        channels *= 2
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4), nn.Flatten(0))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--latent", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda"
    generator = make_generator(args.latent, args.width).to(device)
    discriminator = make_discriminator(args.width).to(device)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(args.batch_size, device=device), torch.zeros(args.batch_size, device=device)

    for step in range(args.steps):
        real = torch.rand(args.batch_size, 3, 64, 64).mul_(2).sub_(1).to(device)
        fake = generator(torch.randn(args.batch_size, args.latent, 1, 1, device=device))

        discriminator_optimizer.zero_grad()
        loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
        loss_d.backward()
        discriminator_optimizer.step()

        generator_optimizer.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        generator_optimizer.step()
        print(f"step {step}  discriminator {loss_d.item():.4f}  generator {loss_g.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
