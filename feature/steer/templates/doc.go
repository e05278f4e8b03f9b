// SPDX-License-Identifier: Apache-2.0

// Package templates remembers the templates of flow exporters, and replays them to a member that takes over an
// exporter. weir serve runs a Keeper.
package templates
