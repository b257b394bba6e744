"""Proximal policy optimization on CartPole: eight environments, a torch policy, minibatches."""

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical


def layer(inputs, outputs, std=np.sqrt(2)):
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    return linear


class Agent(nn.Module):
    def __init__(self, observations, actions, width):
        super().__init__()

        def network(outputs, std):
            first, second = layer(observations, width), layer(width, width)
            return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer(width, outputs, std))

        self.critic, self.actor = network(1, 1.0), network(actions, 0.01)

    def get_action_and_value(self, x, action=None):
        choices = Categorical(logits=self.actor(x))
        action = choices.sample() if action is None else action
        return action, choices.log_prob(action), choices.entropy(), self.critic(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()

    device = torch.device("cuda")
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(args.num_envs)])
    agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.n, args.width).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + envs.single_observation_space.shape, device=device)
    actions, logprobs, rewards, dones, values = (torch.zeros(shape, device=device) for _ in range(5))
    next_obs = torch.tensor(envs.reset(seed=1)[0], device=device)
    next_done = torch.zeros(args.num_envs, device=device)

    for iteration in range(10):
        for step in range(args.num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            actions[step], logprobs[step], values[step] = action, logprob, value.flatten()
            next_obs, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward, device=device)
            next_obs = torch.tensor(next_obs, device=device)
            next_done = torch.tensor(np.logical_or(terminated, truncated), device=device).float()
        with torch.no_grad():
            following = agent.get_action_and_value(next_obs)[3].reshape(1, -1)
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(args.num_steps)):
                alive = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
                after = following if t == args.num_steps - 1 else values[t + 1]
                delta = rewards[t] + 0.99 * after * alive - values[t]
                advantages[t] = last = delta + 0.99 * 0.95 * alive * last
            returns = advantages + values
        flat = [one.reshape(-1, *one.shape[2:]) for one in (obs, actions, logprobs, advantages, returns)]
        for part in np.random.permutation(args.num_steps * args.num_envs).reshape(4, -1):
            o, a, old, advantage, target = (one[part] for one in flat)
            _, logprob, entropy, value = agent.get_action_and_value(o, a)
            ratio = (logprob - old).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = policy - 0.01 * entropy.mean() + 0.25 * ((value.view(-1) - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        print(f"iteration {iteration} loss {loss.item():.4f} {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
