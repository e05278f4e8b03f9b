// SPDX-License-Identifier: Apache-2.0

package feature

// Privileged is implemented by features whose processes need more capabilities than every feature. weir serve keeps the
// capabilities of its running features and drops all others.
type Privileged interface {
	Rights() []Right
}

// Right is a capability and its use.
type Right struct {
	Capability uint // for example unix.CAP_NET_RAW
	For        string
}
