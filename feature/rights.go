// SPDX-License-Identifier: Apache-2.0

package feature

// Privileged is implemented by features whose processes need capabilities beyond the ones that every feature needs. weir serve
// keeps those of the features that it runs and drops all others.
type Privileged interface {
	Rights() []Right
}

// Right is a capability and its use.
type Right struct {
	Capability uint // like unix.CAP_NET_RAW
	For        string
}
