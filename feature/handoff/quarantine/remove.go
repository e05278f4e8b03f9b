// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"errors"
	"net"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// RemoveAll removes the quarantines of all namespaces.
func RemoveAll(l *kernel.WriteLock) error {
	all, err := Store.Keys(l.Root)
	for _, inst := range all {
		ns, e := l.OpenNetns(inst)
		if errors.Is(e, netns.ErrGone) { // its devices are gone, too
			e = Store.Remove(l, inst)
		} else if e == nil {
			if _, rerr := Store.Read(l.Root, inst); rerr != nil {
				e = removeUnread(l, ns, inst)
			} else {
				e = Remove(l, ns)
			}
			ns.Close()
		}
		err = errors.Join(err, e)
	}
	return err
}

// removeUnread removes a quarantine with an unreadable list of devices. It finds filters by name, at any device.
func removeUnread(l *kernel.WriteLock, ns *netns.Handle, inst kernel.Instance) error {
	err := ns.Do(func() error {
		all, err := net.Interfaces()
		for _, i := range all {
			err = errors.Join(err, filterAt(i.Index, false).Detach(false), filterAt(i.Index, true).Detach(false))
		}
		return err
	})
	return errors.Join(err, Store.Remove(l, inst))
}

// Remove removes the quarantine of a namespace. A missing one is not an error.
func Remove(l *kernel.WriteLock, ns *netns.Handle) error {
	rec, err := Store.Read(l.Root, Instance(ns))
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	err = ns.Do(func() (err error) {
		for _, name := range rec.Spec {
			i, e := net.InterfaceByName(name)
			if e != nil {
				continue // gone, with its filters
			}
			err = errors.Join(err, filterAt(i.Index, false).Detach(true), filterAt(i.Index, true).Detach(true))
		}
		return err
	})
	return errors.Join(err, Store.Remove(l, Instance(ns)))
}
