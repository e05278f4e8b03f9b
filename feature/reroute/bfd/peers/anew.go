// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"errors"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
)

// Recreating a device must not put its dead link back into use, because dead links are a usual reason to reset a card
// or a VLAN. The new device's session starts with the old session's verdict. A session without its device stays, with
// its verdict.

// wasOn reports whether a session's device had the given name, and whether it is gone now.
func wasOn(ns *netns.Handle, index int, device string) (same, gone bool) {
	_ = ns.Do(func() error {
		l, err := netlink.LinkByIndex(index)
		gone = errors.As(err, &netlink.LinkNotFoundError{})
		same = gone || err == nil && l.Attrs().Name == device
		return nil
	})
	return same, gone
}

// retain keeps the sessions currently without a device or a local address.
func (p *published) retain(ns *netns.Handle, was map[string]uint32, there map[uint32]engine.Identity, ready map[string]resolved, stays map[uint32]bool) {
	for _, s := range p.Config.Sessions {
		d := was[s.Name]
		id, has := there[d]
		if _, is := ready[s.Name]; is || !has || id.Peer != s.Peer {
			continue
		}
		if same, _ := wasOn(ns, id.Ifindex, s.Device); same {
			p.Discriminators[s.Name], stays[d] = d, true
		}
	}
}

// foundDown reports whether the new session of a name starts with the down verdict of the old session d. A session up
// on a missing device counts as down, because it was about to fail.
func (p *published) foundDown(ns *netns.Handle, e *engine.Engine, name string, d uint32, there map[uint32]engine.Identity) (bool, error) {
	id, has := there[d]
	if !has {
		return false, nil
	}
	device := ""
	for _, s := range p.Config.Sessions {
		if s.Name == name && s.Peer == id.Peer && !s.Observe {
			device = s.Device
		}
	}
	same, gone := wasOn(ns, id.Ifindex, device)
	st, ok, err := e.Status(d)
	return device != "" && ok && same && (st.LinkDown || gone && st.BeenUp), err
}
