// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"net"
	"os"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Checked = Feature{}

// Faults implements feature.Checked: devices that have lost the filter which copies datagrams.
func (Feature) Faults(_ context.Context, r *kernel.Root) (out []kernel.Fault, err error) {
	all, err := r.Instances(Name)
	for _, i := range all {
		if i != copyInstance(i.Scope) {
			continue
		}
		lost, lerr := lostCopies(r, i)
		for _, device := range lost {
			f := kernel.NotAttached(i, "the filter %s is gone from %s: datagrams that arrive there are not copied", copyFilter, device)
			f.Device = device
			out = append(out, f)
		}
		err = errors.Join(err, lerr)
	}
	return out, err
}

// lostCopies are the devices that are there, were given the filter, and have none.
func lostCopies(r *kernel.Root, i kernel.Instance) (out []string, err error) {
	o, err := r.Open(i, "devices")
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, kernel.ErrDamaged) {
		return nil, nil // removed, or damage that the pins tell of
	} else if err != nil {
		return nil, err
	}
	defer o.Close()
	devices, err := entries[uint32, copyCopyDevice](o.Maps["devices"])
	if err != nil {
		return nil, err
	}
	ns, err := r.OpenNetns(i)
	if errors.Is(err, netns.ErrGone) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer ns.Close()
	err = ns.Do(func() error {
		for index := range devices {
			d, err := net.InterfaceByIndex(int(index))
			if err != nil {
				continue // with its device
			}
			there, err := kernel.Clsact{Ifindex: int(index), Name: copyFilter}.Attached()
			if errors.Is(err, os.ErrPermission) {
				continue
			} else if err != nil {
				return err
			}
			if !there {
				out = append(out, d.Name)
			}
		}
		return nil
	})
	return out, err
}
