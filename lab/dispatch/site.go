// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// site is a network namespace with all addresses local, and a number of answering services.
type site struct {
	ns       *netns.Handle
	name     string
	services int
	holders  []*lab.Process
}

// site creates a site. Registered services belong to weir; share, if set, receives their sockets, too.
func (x *experiment) site(ctx context.Context, name string, services int, registered bool, share *ebpf.Map) (*site, error) {
	ns, full, err := x.env.Namespace(name)
	if err != nil {
		return nil, err
	}
	if err := topo.Addresses(ns); err != nil {
		return nil, err
	}
	if err := topo.Own(ns, netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("198.18.0.0/15")); err != nil {
		return nil, err
	}
	root := unregistered
	if registered {
		root = x.env.Root
	}
	s := &site{ns: ns, name: full, services: services}
	s.holders, err = startServices(ctx, x.env, full, root, services, share)
	return s, err
}

// programID returns the id of the attached program.
func (s *site) programID() (uint32, error) {
	p, err := weirProgram(s.ns)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID()
	return uint32(id), nil
}

func (s *site) scope() string { return strconv.FormatUint(s.ns.Inode(), 10) }

// load runs `weir bind load` or `replace` with a file of bindings.
func (x *experiment) load(ctx context.Context, s *site, command string, all []bindings.Binding) error {
	file := filepath.Join(x.env.Dir, "bindings.json")
	if err := writeFile(file, all); err != nil {
		return err
	}
	_, err := x.weir.Run(ctx, "bind", command, "--netns", s.name, "--lines", "0", file)
	return err
}

// bind sets a site's bindings without a command.
func (x *experiment) bind(ctx context.Context, s *site, all []bindings.Binding) error {
	l, err := kernel.OpenRoot(x.env.Root).Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	if _, err := bindings.ReplaceBindings(l, s.ns, all); err != nil {
		return fmt.Errorf("bind %d: %w", len(all), err)
	}
	return nil
}
