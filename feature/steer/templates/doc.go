// SPDX-License-Identifier: Apache-2.0

// Package templates keeps the templates of flow exporters, and replays them to a
// member that takes an exporter over. weir serve runs a Keeper.
package templates
