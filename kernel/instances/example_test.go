// SPDX-License-Identifier: Apache-2.0

package instances_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// counter is the spec of an instance, stored as JSON.
type counter struct {
	Device string `json:"device"`
}

var counters = instances.Store[counter]{Feature: "counter", ABI: 1}

// A store publishes instances and reads them back. It lists unreadable ones separately.
func ExampleStore() {
	root := kernel.OpenRoot("/sys/fs/bpf/example")
	lock, err := root.Lock(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Unlock()
	eth0 := counters.Name(kernel.HostScope, "eth0")
	if err := counters.Publish(lock, eth0, instances.Form[counter]{Spec: counter{Device: "eth0"}}); err != nil {
		fmt.Println(err)
		return
	}
	all, unreadable, err := counters.All(root)
	if err = errors.Join(err, unreadable.Err()); err != nil {
		fmt.Println(err)
	}
	for _, rec := range all {
		fmt.Println(rec.Name, rec.Spec.Device, rec.Meta.Created)
	}
	if err := counters.Remove(lock, eth0); err != nil {
		fmt.Println(err)
	}
}
