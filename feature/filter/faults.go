// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"net"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Checked = Feature{}

// Faults implements feature.Checked. It reports missing nftables rules, and interfaces newer than
// their tc filter.
func (Feature) Faults(_ context.Context, r *kernel.Root) (out []kernel.Fault, err error) {
	all, _, err := filters.All(r) // damage and unreadable instances are reported elsewhere
	for _, rec := range all {
		p := publishedFrom(rec)
		if p.Attacher != attacherClsact && p.Attacher != attacherNFT {
			continue
		}
		lost, lerr := lostAttachments(r, rec.Instance, p)
		for _, place := range lost {
			f := kernel.NotAttached(rec.Instance, "nothing runs at %s", place.Name)
			f.Device = place.Interface
			out = append(out, f)
		}
		err = errors.Join(err, lerr)
	}
	return out, err
}

// lostAttachments returns missing attachments possible now and absent from the record.
func lostAttachments(r *kernel.Root, i kernel.Instance, p *published) (out []Attachment, err error) {
	o, err := r.Open(i)
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, kernel.ErrDamaged) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer o.Close()
	ns, err := findNetns(p)
	if errors.Is(err, netns.ErrGone) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer ns.Close()
	attachments, err := p.Attacher.attacher().attachments(&instance{inst: i, pub: p, pins: o, ns: ns})
	if permission(err) {
		return nil, nil
	}
	told := map[int]bool{} // reported by kernel.Checker
	if p.Attacher == attacherClsact && err == nil {
		told, err = tcFilters{}.known(o.Maps[devicesMap])
	}
	_ = ns.Do(func() error {
		for _, place := range attachments {
			if !place.lacks {
				continue
			}
			if device, err := net.InterfaceByName(place.Interface); err != nil || !has(told, device.Index) {
				out = append(out, place)
			}
		}
		return nil
	})
	return out, err
}

func has(m map[int]bool, index int) bool { _, ok := m[index]; return ok }
