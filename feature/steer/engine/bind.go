// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/kernel/probe"
)

// Daemons share a port only if each of their sockets has SO_REUSEPORT. For a service with share_port, programs at the
// root of cgroup2 set it when a socket binds one of the service's ports. Cgroups are independent of network namespaces,
// so one instance serves all namespaces. The keys of its map contain the namespace.

// BindInstance exists while any service has share_port.
var BindInstance = kernel.Instance{Scope: kernel.HostScope, Feature: spec.Name, Name: "@bind"}

// ReconcileBind makes the hook match the pins of the services. The first service with share_port attaches it, the last
// one removes it. ReconcileBind is idempotent and recovers a killed command. With wanted false, it does nothing if
// there is no instance.
func ReconcileBind(l *kernel.WriteLock, wanted bool) error {
	if _, err := record.Shared.Read(l.Root, BindInstance); errors.Is(err, kernel.ErrABI) || errors.Is(err, kernel.ErrNotExist) && !wanted && !l.Has(BindInstance) {
		return nil // status, plans and doctor report an unreadable instance
	}
	want, unread, err := bindPorts(l.Root)
	if err != nil {
		return err
	}
	if len(want) == 0 && (len(unread) == 0 || !l.Has(BindInstance)) {
		return l.Remove(BindInstance)
	}
	o, err := openBind(l)
	if err != nil {
		return err
	}
	defer o.Close()
	ports := o.Maps["ports"]
	have, err := Entries[bpf.BindBindKey, bpf.BindBindCount](ports)
	if err != nil {
		return fmt.Errorf("read shared ports: %w", err)
	}
	for k := range want {
		if _, ok := have[k]; !ok {
			if err := ports.Put(k, bpf.BindBindCount{}); err != nil {
				return fmt.Errorf("share port %d: %w", k.Port, err)
			}
			kernel.Step("steer:bind")
		}
	}
	for k := range have {
		if !want[k] && len(unread) == 0 { // otherwise the port may belong to an unreadable service
			if err := ports.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("stop sharing port %d: %w", k.Port, err)
			}
			kernel.Step("steer:bind")
		}
	}
	return nil
}

// bindPorts returns the ports of all services with share_port on this host, and the unreadable services.
func bindPorts(r *kernel.Root) (_ map[bpf.BindBindKey]bool, unread instances.Unreadable, _ error) {
	all, err := r.Instances(spec.Name)
	if err != nil {
		return nil, nil, err
	}
	out := map[bpf.BindBindKey]bool{}
	for _, i := range all {
		if !kernel.ValidName(i.Name) {
			continue
		}
		p, err := record.Read(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue
		} else if err != nil {
			unread.Add(i, err)
			continue
		}
		for _, k := range p.BindKeys() {
			out[k] = true
		}
	}
	return out, unread, nil
}

// openBind opens the hook. It attaches the hook again if it is missing, detached or of another version.
func openBind(l *kernel.WriteLock) (*kernel.Opened, error) {
	o, err := l.Open(BindInstance)
	if err == nil {
		if o.Meta.Object == kernel.ObjectHash(bpf.BindObject) && bindAttached(o) {
			return o, nil
		}
		o.Close()
	} else if !errors.Is(err, kernel.ErrNotExist) {
		return nil, err
	}
	if err := publishBind(l); err != nil {
		return nil, err
	}
	return l.Open(BindInstance)
}

// bindHooks returns the programs' attachments.
func bindHooks() (map[string]kernel.Attachment, error) {
	cgroup, err := units.CgroupRoot()
	if err != nil {
		return nil, err
	}
	return map[string]kernel.Attachment{
		bpf.BindProgBindShare4: kernel.Cgroup{Path: cgroup, Hook: ebpf.AttachCGroupInet4Bind},
		bpf.BindProgBindShare6: kernel.Cgroup{Path: cgroup, Hook: ebpf.AttachCGroupInet6Bind},
	}, nil
}

func bindAttached(o *kernel.Opened) bool {
	at, err := bindHooks()
	if err != nil {
		return false
	}
	for name, a := range at {
		ln, err := o.Link(name)
		if err != nil {
			return false
		}
		err = a.Verify(ln)
		ln.Close()
		if err != nil {
			return false
		}
	}
	return true
}

func publishBind(l *kernel.WriteLock) error {
	if err := probe.BindShare.Check(); err != nil {
		return err
	}
	spec, err := bpf.LoadBind()
	if err != nil {
		return err
	}
	at, err := bindHooks()
	if err != nil {
		return err
	}
	c, err := kernel.Load(spec, []string{bpf.BindProgBindShare4, bpf.BindProgBindShare6}, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{"ports": c.Maps[bpf.BindMapBindPorts]}, Links: map[string]kernel.Link{}}
	for name, a := range at {
		ln, err := a.Attach(c.Programs[name])
		if err != nil {
			return err
		}
		defer ln.Close()
		pins.Links[name] = ln
	}
	kernel.Step("steer:bind attached")
	return record.Shared.Publish(l, BindInstance, instances.Form[struct{}]{Object: kernel.ObjectHash(bpf.BindObject), Pins: pins})
}

// ProblemBind is the Problem of a service with share_port but without the hook.
const ProblemBind = "the hook of share_port is missing, so daemons without SO_REUSEPORT cannot share the port: weir apply recovers it"

// ReadShared reads the counters of a service's ports.
func ReadShared(p *record.Service, r *kernel.Root) (out Shared, err error) {
	o, err := r.Open(BindInstance, "ports")
	if err != nil {
		return out, err
	}
	defer o.Close()
	if _, err := record.Shared.Decode(BindInstance, o.Meta); err != nil {
		return out, err
	}
	for _, k := range p.BindKeys() {
		var c bpf.BindBindCount
		if err := o.Maps["ports"].Lookup(k, &c); err != nil {
			return out, err
		}
		out.Sockets += c.Shared
		out.Failed += c.Failed
	}
	return out, nil
}

// Shared counts the sockets that bound a port of a service with share_port.
type Shared struct {
	Sockets uint64 `json:"sockets"` // given SO_REUSEPORT
	Failed  uint64 `json:"failed"`  // SO_REUSEPORT rejected by the kernel
}
