// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"errors"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
)

// A dead link is not used because its device is made anew: a card or a VLAN is reset when its link is dead, as a rule. The session of
// the new device begins with the verdict of the session before. A session whose device is away stays, with its verdict.

// wasOn says that a session was on a device of that name, and whether that one has gone meanwhile.
func wasOn(ns *netns.Handle, index int, device string) (same, gone bool) {
	_ = ns.Do(func() error {
		l, err := netlink.LinkByIndex(index)
		gone = errors.As(err, &netlink.LinkNotFoundError{})
		same = gone || err == nil && l.Attrs().Name == device
		return nil
	})
	return same, gone
}

// retain has sessions stay that have no device, or no address of their own, at present.
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

// foundDown says whether the session that takes the place of another, with the discriminator d, takes over that its link is down. A
// session that was up on a device that has gone is about to find its link down.
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
