// SPDX-License-Identifier: Apache-2.0

package state

import (
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/internal/netns"
)

// OpenNetns opens the service's namespace.
func (s *Service) OpenNetns() (*netns.Handle, error) {
	return slots.OpenNetns(s.Record.Netns, netns.ID{Inode: s.Inode, Cookie: s.Record.Cookie})
}

// Withdrawn reports whether an operator keeps a slot empty. No slot of a nil service is withdrawn.
func (s *Service) Withdrawn(slot int) bool {
	return s != nil && slot < len(s.Slots) && s.Slots[slot].Withdrawn
}
