// SPDX-License-Identifier: Apache-2.0

package kernel_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/kernel"
)

// A writer publishes an instance atomically. A reader needs no lock.
func ExampleRoot() {
	root := kernel.OpenRoot("/sys/fs/bpf/example")
	lock, err := root.Lock(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Unlock()
	count, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer count.Close()
	web := kernel.Instance{Scope: kernel.HostScope, Feature: "counter", Name: "web"}
	if err := lock.Publish(web, kernel.Meta{ABI: 1}, kernel.Pins{Maps: map[string]*ebpf.Map{"count": count}}); err != nil {
		fmt.Println(err)
		return
	}
	pins, err := root.Open(web, "count")
	if errors.Is(err, kernel.ErrNotExist) {
		fmt.Println("removed meanwhile")
		return
	} else if err != nil {
		fmt.Println(err)
		return
	}
	defer pins.Close()
	var packets uint64
	fmt.Println(pins.Maps["count"].Lookup(uint32(0), &packets), packets)
}
